"""Operations on each row or number: norms, activations, quantization of rows, inputs of a step."""
