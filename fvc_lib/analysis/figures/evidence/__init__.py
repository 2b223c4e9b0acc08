"""What a video's own page shows: small drawings that need no script, so that a page can be handed on."""
