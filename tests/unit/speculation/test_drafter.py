"""One request's drafts, and what is known of the next one."""

import random

from soloist.speculation import Costs, Drafter, Drafting


def test_what_is_behind_a_right_draft_is_drafted_once_the_answer_is_there() -> None:
    """For every number of drafts that costs lead to, until the prediction ends."""
    num_known = 0
    for seed in range(300):
        rng = random.Random(seed)
        costs = Costs(tuple(sorted(rng.randint(900, 4000) for _ in range(7))))
        text = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        drafter = Drafter(Drafting(costs, looks_up=rng.random() < 0.5), [1, 2, 3], text)
        answer: list[int] = []
        for _ in range(12):
            draft = drafter.draft(answer, rng.randint(0, 7))
            if draft is None:
                answer.append(text[len(answer)] if len(answer) < len(text) else 99)
                continue
            most = rng.randint(-1, 7)
            found = drafter.behind(draft, most)
            assert found == drafter.behind(draft, most), "nothing changes"
            right = text[len(answer) : len(answer) + len(draft.ids) + 1]
            if found is None or rng.random() < 0.2:
                drafter.judge(draft, 1, 0)
                answer.append(98)
                continue
            num_known += 1
            token_id, following = found
            assert [*draft.ids, token_id] == right
            drafter.judge(draft, len(draft.ids), len(draft.ids))
            answer += right
            assert drafter.draft(answer, most) == following
    assert num_known > 300
