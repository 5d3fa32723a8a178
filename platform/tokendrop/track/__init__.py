"""What a run leaves behind: its folder first, MLflow from there."""
