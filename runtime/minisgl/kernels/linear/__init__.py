"""Products x W^T, by the kind of weight and the number of rows."""
