def choose_moe(
    activation: Format,
    num_rows: int,
    num_experts: int,
) -> Instance:
    """The row for both GEMMs of a layer; ``num_rows`` is tokens times top_k."""
    fitting = [row for row in INSTANCES if row.activation == activation]
    return _narrowest_that_holds(expected_rows(num_rows, num_experts), fitting)
