"""What watches over a run: values that devices hold in common, the loss, the compiled program. Each says what it found; the run acts."""
