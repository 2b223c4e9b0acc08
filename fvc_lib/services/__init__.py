"""Services that all other packages use: configuration, run paths, table schemas, memory, checkpoints, atomic files.

This package imports no other package of ``fvc_lib``.
"""
