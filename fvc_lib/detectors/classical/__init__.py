"""Models on features, one file per kind: they see numbers measured of a video in place of its clips."""
