"""Detectors: networks and classical models, one file per network or per family of networks with a common adapter."""
