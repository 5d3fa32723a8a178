"""What a trained model is worth: held-out loss, lm-eval's tasks, and a Hugging Face model to take away."""
