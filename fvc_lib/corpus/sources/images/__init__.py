"""Image corpora: folders and manifests, Food-101, Nutrition5k."""
