from models.training.schedule import Schedule


def test_rate_warms_up_stays_and_decays_to_zero():
    schedule = Schedule(warmup_steps=10, decay=0.75)
    assert schedule.rate(0, 0.0) == 0.1
    assert schedule.rate(100, 0.5) == schedule.rate(100, 0.75) == 1.0
    assert 0.0 < schedule.rate(100, 0.9) < schedule.rate(100, 0.8) < 1.0
    assert schedule.rate(100, 1.0) == 0.0


def test_picks_replace_all_rows_after_the_dense_share():
    schedule = Schedule(dense=0.25)
    assert not schedule.sparse(0.24)
    assert schedule.sparse(0.25)
