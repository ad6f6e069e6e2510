"""Tasks of the lab: segmentation. Image classification is the default `papa.Task`."""
