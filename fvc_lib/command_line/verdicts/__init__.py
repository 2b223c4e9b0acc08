"""Commands that apply a trained model to files: ``predict``, the pages of its verdicts, and ``app``."""
