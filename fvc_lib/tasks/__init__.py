"""What the tasks add to the engine: data, loss, metrics, selection, results."""
