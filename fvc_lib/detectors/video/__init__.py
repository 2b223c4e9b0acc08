"""Networks on whole clips, from the packages that publish them."""
