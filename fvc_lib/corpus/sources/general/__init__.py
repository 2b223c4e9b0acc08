"""Video corpora that are not about one kind of fake: manifests, FVC-2018."""
