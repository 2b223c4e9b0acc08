"""Forensic features: one file per family, measured at native resolution on tiles of equal area."""
