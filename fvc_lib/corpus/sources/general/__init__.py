"""Loaders of video corpora of any kind of fake: manifests, folders of labels, tars, FVC-2018."""
