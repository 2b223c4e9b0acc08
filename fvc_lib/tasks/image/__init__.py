"""Task image: classes and numbers from pictures."""
