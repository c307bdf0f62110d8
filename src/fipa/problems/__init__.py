"""The problems of the paper: data, model and metric, one small file each."""
