"""tools/study/studies: every study can be told from the others, and run."""

from __future__ import annotations

from tools.study.studies import STUDIES


def test_no_two_studies_have_a_folder_or_a_title_in_common() -> None:
    assert len(STUDIES) == 8 and len({study.title for study in STUDIES.values()}) == 8


def test_every_arm_comes_once_and_a_synchronous_one_before_an_optimizer_s_others() -> None:
    for study in STUDIES.values():
        assert len(set(study.plan)) == len(study.plan)
        for name in {arm.optimizer for arm in study.plan}:
            assert next(arm for arm in study.plan if arm.optimizer == name).synchronous
