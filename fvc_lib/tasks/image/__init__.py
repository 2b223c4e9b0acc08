"""Task image: train a network that predicts a class and numbers from a picture."""
