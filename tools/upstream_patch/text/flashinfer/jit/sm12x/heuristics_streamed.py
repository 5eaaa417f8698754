# The streamed layer reads every weight once for each tile of 8 tokens: it is chosen
# as long as an expert that is hit can expect no more rows than this.
STREAMED_ROWS = 4.5


def choose_moe(
    activation: Format,
    num_rows: int,
    num_experts: int,
    hidden: int,
    inter: int,
    all_sms: bool = True,
) -> Instance:
    """The row for a layer; ``num_rows`` is tokens times top_k.

    Blocks of a streamed layer wait for each other, so that without ``all_sms`` of the
    device only pairs of GEMMs are chosen from.
    """
    rows = expected_rows(num_rows, num_experts)
    fitting = [row for row in INSTANCES if row.activation == activation]
    if all_sms and rows <= STREAMED_ROWS:
        for row in fitting:
            if row.streamed and row.takes(num_rows, hidden, inter):
                return row
    return _narrowest_that_holds(rows, [row for row in fitting if not row.streamed])
