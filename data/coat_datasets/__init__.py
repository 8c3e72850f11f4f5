"""Makers of data sets: generated scenes, CIFAR-10, NLVR, and downloads from the Hub."""

from coat_datasets.cifar import convert_cifar10
from coat_datasets.nlvr import convert_nlvr
from coat_datasets.scenes import make_scenes

__all__ = ["convert_cifar10", "convert_nlvr", "make_scenes"]
