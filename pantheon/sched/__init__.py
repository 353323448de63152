"""Many users on one model: who waits, who holds a slot, whose columns the next forward carries.

    overflow    a place for each user: free, queued (FIFO, bounded, timed) or refused with the numbers
    slot        IDLE -> PREFILL -> BOUND -> DECODE -> IDLE, and who may move it
    turnstile   FIFO tickets for the one forward in flight
    compaction  which columns the next forward carries (pure)
    run, ring   one answer in the making; its tokens on their way to the owner
    shared      what owners and the driver share, and the forward itself
    driver      the thread that steps all slots and samples them
    handle      the owner's side: the prompt is read, tokens are pulled, the slot is given back
    scheduler   the facade

An *owner* is the thread of one request.  It alone returns its slot to IDLE.  Whoever holds the turn is the only one
that touches the state, samplers and runs; `Shared.mu` guards everything else, with the conditions `cv_gpu` (turnstile),
`cv_work` (the driver waits for work), `cv_idle` (the queue) and one for each run (its owner waits for tokens).
Order: the turn, then mu or the prefix cache's lock.  The holder of the turn never waits on a condition, and no lock is
held across a forward, so that a turn always ends.  Must not know HTTP, text or requests.  Spec: areas F, G, J, Q.
"""
