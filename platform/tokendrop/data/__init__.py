"""From text to rows of tokens, in an order that is arithmetic."""
