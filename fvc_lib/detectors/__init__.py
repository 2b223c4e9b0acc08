"""Detectors: the networks, one file per network or per family of networks with a common adapter."""
