"""Checkpoints of a stage, for bit-exact resume and for resume with other ranks and ZeRO stages.

``RUN/<stage>/checkpoints/step-00000100/`` contains

- ``trainer.json``: the progress of the stage (:class:`.metadata.Progress`);
- ``contents.json``: names, shapes and dtypes of all parameters, and settings of the parameter
  groups (:class:`.metadata.Contents`), compared before anything is loaded;
- ``rank-*.json`` and ``rank-*.safetensors``: weights and optimizer states (:mod:`.shards`), as the
  fragments of parameters that a rank updates (:mod:`.partitions`);
- ``random-*.json``: the states of each rank's random generators;
- ``model/``: configuration, tokenizer and processor, for ``coat-vlm export``;
- ``manifest.json``: the size and SHA-256 of each of these files (:mod:`.atomic_folder`).
"""
