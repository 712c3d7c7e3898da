"""Image generation by diffusion, in parallel over the denoising steps."""
