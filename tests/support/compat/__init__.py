"""Message formats of this tree and of earlier versions, compared."""
