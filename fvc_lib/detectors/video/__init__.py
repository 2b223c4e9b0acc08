"""Published networks on whole clips, from torchvision, pytorchvideo and transformers."""
