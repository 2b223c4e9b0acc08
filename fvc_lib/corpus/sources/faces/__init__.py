"""Published corpora of faces that were swapped, re-enacted or lip-synced."""
