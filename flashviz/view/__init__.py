"""The picture: a recording, a step and a time become plain shapes; matplotlib draws them. No program, no CUDA here."""
