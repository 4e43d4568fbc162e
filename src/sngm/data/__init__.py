"""Files on disk to tensors in memory."""
