"""Detectors: networks and classical models. A file has one network, or a family of networks that share code."""
