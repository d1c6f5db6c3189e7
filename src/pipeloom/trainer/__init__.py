"""What is behind `pipeloom train`: a small byte-level GPT, its text, and the training loop of one rank."""
