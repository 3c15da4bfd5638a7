"""The three tests of the pull request that the project began with, by its names."""

import test_planner_scenarios as planner_rows
import test_store_scenarios as store_rows


def test_on_new_request_lifecycle():
    store_rows.test_s01_only_tiers_that_asked_are_remembered_until_the_finish()


def test_prepare_store_cascades_existing_blocks_to_request_level_tiers():
    store_rows.test_s02_present_blocks_go_at_once_and_only_to_tiers_that_asked()


def test_request_level_policy_stores_all_blocks():
    planner_rows.test_s03_after_a_load_the_policy_decides_what_is_offered()
