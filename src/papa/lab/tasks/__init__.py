"""Tasks of the lab: segmentation and language modelling. Classification is the default of `papa.training.task.Task`."""
