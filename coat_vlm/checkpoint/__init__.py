"""Checkpoints of a stage that continue exactly, at any number of ranks and any ZeRO stage.

``RUN/<stage>/checkpoints/step-00000100/`` holds

- ``trainer.json``: how far the stage had got (:class:`.contents.Progress`);
- ``contents.json``: names, shapes and dtypes of all parameters, settings of the parameter groups
  (:class:`.contents.Contents`), compared before anything is loaded;
- ``rank-*.json`` and ``rank-*.safetensors``: weights and optimizer states (:mod:`.shards`), as the
  pieces of parameters that a rank updates (:mod:`.partitions`);
- ``random-*.json``: each rank's random generators;
- ``model/``: configuration, tokenizer and processor, for ``coat-vlm export``;
- ``manifest.json``: the size and SHA-256 of each of these files (:mod:`.manifest`).
"""
