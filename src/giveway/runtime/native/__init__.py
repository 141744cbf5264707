"""The backend on GiveWay's own CPU kernels, without PyTorch."""
