"""Models on features of videos: where their numbers come from, one outer fold, and what the report says of them."""
