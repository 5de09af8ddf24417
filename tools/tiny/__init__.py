"""How clover-tiny is made: its tasks, its tokenizer and its training loop."""
