"""The vLLM adapter: the only package that imports vllm.

``spec`` is what vLLM loads (``spec_name``, ``spec_module_path``). In the scheduler it
makes ``manager`` over an ``Engine``; in each GPU worker one of ``copies``, which moves
bytes between KV tensors and slots. ``setup`` reads vLLM's configuration, ``release``
says which vLLM it is, ``report`` gives figures and events back. ``load_sources`` and
``stale_offers`` remember for the manager what vLLM asks too late, or offers too long.

``tier`` is the other way in: a secondary tier under vLLM's own manager, on ``staging``.
"""
