"""Tasks of the lab: segmentation. Image classification is the default of `papa.task.Task`."""
