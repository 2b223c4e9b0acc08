"""Forensic features: numbers that show traces of coding or manipulation, measured at a video's native resolution."""
