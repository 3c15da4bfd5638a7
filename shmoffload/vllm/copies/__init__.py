"""GPU workers: from block ids to copies between KV tensors and slots."""
