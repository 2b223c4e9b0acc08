"""Networks: one file per detector, or per family that shares one adapter."""
