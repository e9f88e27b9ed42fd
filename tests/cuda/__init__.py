"""The CUDA path on a machine without CUDA: standin/ is the device, the other files ask it what a real one cannot tell."""
