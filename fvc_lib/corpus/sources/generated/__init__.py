"""Published corpora of videos that a generator made from text, pictures or videos."""
