"""Datasets: from files on disk to tensors in memory."""
