"""Is this video fake? A finished run, or what was exported of one, asked of new files."""
