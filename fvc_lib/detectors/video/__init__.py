"""Published networks on whole clips, from the packages torchvision, pytorchvideo and transformers."""
