"""How tokens are chosen in what is measured."""

from soloist.sampling import SamplingParams


def fixed_params(temperature: float, new_tokens: int) -> SamplingParams:
    """What every run asks for alike: so many tokens, and the same ones.

    Raises BadSampling: a temperature that there is none of.
    """
    seed = None if temperature == 0 else 0
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=new_tokens, ignore_eos=True
    )
