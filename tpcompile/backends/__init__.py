"""What a sharded graph becomes."""
