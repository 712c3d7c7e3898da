import torch, math, time
from deeppcr.linear import solve as lsolve, Scalar
def coeffs(kind, L, dev, v=1.0):
    T=1000; betas=torch.linspace(1e-4,0.02,T,dtype=torch.float64); ab=(1-betas).cumprod(0)
    t=torch.arange(0,T,T//L).flip(0)[:L] if L<T else torch.arange(T-1,-1,-1)
    before=ab[t]; after=torch.cat([ab[t][1:],torch.ones(1,dtype=torch.float64)])
    s,n=before.sqrt(),(1-before).sqrt()
    if kind=='ddpm':
        alpha=before/after; beta=1-alpha; dev_=beta.sqrt().clone(); dev_[-1]=0
        clean=after.sqrt()*beta/(1-before); smp=alpha.sqrt()*(1-after)/(1-before)
        keep=smp+clean/s; gain=-clean*n/s
    else:
        dev_=torch.zeros_like(s); keep=after.sqrt()/s; gain=-after.sqrt()*n/s+(1-after).sqrt()
    return dict(t=t.to(dev),keep=keep,gain=gain,dev=dev_,s=s,n=n,L=len(t))
class Run:
    def __init__(S, net, c, z0, noise, W, prior=1.0, hold=True, accel='anderson', crit='rate', tol=1e-3, freeze=0.05, growth=100., start=None, minev=2, rho_max=0.7, count_first=True, pad=None):
        S.net,S.c,S.W=net,c,min(W,c['L']); dev=z0.device; S.dev=dev
        L=S.L=c['L']; f=lambda x: x.to(dev,torch.float32)
        S.K,S.G=f(c['keep']),f(c['gain']); n,s=c['n'],c['s']
        v=torch.as_tensor(prior,dtype=torch.float64).cpu().reshape(1,-1); S.sig=f(n[:,None]/(s[:,None]**2*v+n[:,None]**2)); S.w=f((s[:,None]/(s[:,None]**2*v+n[:,None]**2)))
        S.D=z0.numel(); S.z=torch.zeros(L+1,S.D,device=dev); S.z[0]=z0.flatten(); S.shape=z0.shape
        S.N=f(c['dev'])[:,None]*noise.reshape(L,-1) if noise is not None else torch.zeros(L,S.D,device=dev)
        S.r=torch.zeros(L,S.D,device=dev); S.p=0; S.hold=hold; S.accel=accel; S.crit=crit
        left=1-torch.arange(1,L+1,dtype=torch.float64)/L
        S.thr=f(freeze*tol*growth**-left); S.minev=minev; S.rho_max=rho_max
        S.ev=torch.zeros(L,dtype=torch.long,device=dev); S.lastu=torch.full((L+1,),math.inf,device=dev)
        S.U=torch.zeros(2,L+1,S.D,device=dev); S.P=torch.zeros(2,L+1,S.D,device=dev); S.known=torch.zeros(2,L+1,dtype=torch.bool,device=dev)
        S.slope=S.sig.clone(); S.zin=torch.zeros(L,S.D,device=dev); S.out=torch.zeros(L,S.D,device=dev)
        if start is not None: S.z[1:]=start
        else: S.solve_from(0,L)
    def solve_from(S,p,q):
        A=S.K[p:q,None]+S.G[p:q,None]*S.slope[p:q]; b=S.G[p:q,None]*S.r[p:q]+S.N[p:q]
        b=b.clone(); b[0]+=A[0]*S.z[p]
        if q-p==1: new=b
        else: new=scan(A,b)
        return new
    def __call__(S, maxit=100000):
        L,W=S.L,S.W; rows=its=0; S.z[1:]=S.solve_from(0,L) if True else 0
        while S.p<L and its<maxit:
            p=S.p; q=min(p+W,L); m=q-p
            zi=S.z[p:q]; out=S.net(zi.reshape(m,*S.shape[1:]),S.c['t'][p:q]).reshape(m,-1).float()
            rows+=m; its+=1
            S.ev[p:q]+=1
            if S.accel in ('secant','both'):
                dz=zi-S.zin[p:q]; do=out-S.out[p:q]; dd=(dz*dz).sum(1); ok=(S.ev[p:q]>1)&(dd>1e-10*S.D*zi.square().mean())
                sec=(dz*do).sum(1)/dd.clamp_min(1e-30); lim=1.2/ S.c['n'][p:q].to(sec)
                sec=torch.minimum(sec.clamp_min(0),lim)
                S.slope[p:q]=torch.where(ok,sec,S.slope[p:q,0])[:,None]
                S.zin[p:q]=zi; S.out[p:q]=out
                # steps seen once: slope of the last step that was seen twice, relative to the prior's
                okl=ok.nonzero()
                if len(okl):
                    k=int(okl[-1]); ratio=S.slope[p+k,0]*S.c['n'][p+k].item()
                    new=S.ev[p:q]<=1
                    nn=S.c['n'].to(S.slope)
                    S.slope[p:q]=torch.where(new,ratio/nn[p:q],S.slope[p:q,0])[:,None]; S.slope[q:]=(ratio/nn[q:])[:,None]
            S.r[p:q]=out-S.slope[p:q]*zi
            e=min(q+W+8,L)
            if S.hold and e>q:
                # hold the clean/noise estimate: rest of the last step
                if S.hold=='scaled': S.r[q:e]=S.r[q-1]*(S.w[q:e]/S.w[q-1:q])
                elif S.hold=='linear' and m>4:
                    d=max(1,m//4); k=torch.arange(1,e-q+1,device=S.dev)[:,None].clamp(max=m)/d
                    S.r[q:e]=S.r[q-1]+(S.r[q-1]-S.r[q-1-d])*k
                else: S.r[q:e]=S.r[q-1]
            new=S.solve_from(p,e)          # z_{p+1..e}
            old=S.z[p+1:e+1]; u=new-old
            size=u.abs().amax(1)
            z2=new
            if S.accel in ('anderson','both'):
                upd,pl=u[:m],new[:m]; known=torch.ones(m,dtype=torch.bool,device=S.dev); ch=[];mv=[]; nu,npl=upd,pl
                for h in range(2):
                    known=known&S.known[h,p+1:q+1]; k=known[:,None]
                    ch.append(torch.where(k,nu-S.U[h,p+1:q+1],0)); mv.append(torch.where(k,npl-S.P[h,p+1:q+1],0)); nu,npl=S.U[h,p+1:q+1],S.P[h,p+1:q+1]
                a,b=ch; pr=[(x*y).sum(1).cumsum(0) for x,y in ((a,a),(a,b),(b,b),(a,upd),(b,upd))]
                w=lsq(*pr); z2=new.clone(); 
                for wi,mi in zip(w,mv): z2[:m]-=wi[:,None]*mi
                S.U[1]=S.U[0];S.P[1]=S.P[0];S.known[1]=S.known[0];S.known[0]=False
                S.U[0,p+1:q+1]=upd;S.P[0,p+1:q+1]=pl;S.known[0,p+1:q+1]=True
                z2[0]=new[0]
                size=torch.maximum(size,(z2-old).abs().amax(1))
            S.z[p+1:e+1]=z2
            h=S.z[p+1:q+1].abs().amax(1)
            sz=size[:m]; thr=S.thr[p:q]
            if S.crit=='rate':
                rho=(sz/S.lastu[p+1:q+1]).clamp(0.02,1e9); est=torch.where(rho<S.rho_max,sz*rho/(1-rho).clamp_min(1e-3),math.inf)
                est=torch.minimum(est,sz)
            elif S.crit=='contr':   # like rate but the ratio of all the window in this iteration
                est=sz*0.3
            else: est=sz
            S.lastu[p+1:e+1]=size
            ok=(est<=thr+32*1.2e-7*h)&(S.ev[p:q]>=S.minev)
            ok[0]=True
            nok=(~ok).nonzero(); S.p=q if len(nok)==0 else p+int(nok[0])
        S.rows,S.its=rows,its
        return S.z[L].reshape(S.shape[1:])
def lsq(one,both,two,a1,a2,ridge=1e-5):
    tiny=1e-37; one,two=one.clamp_min(tiny).sqrt(),two.clamp_min(tiny).sqrt(); cos,a1,a2=both/(one*two),a1/one,a2/two; d=1+ridge; det=d*d-cos*cos
    return (d*a1-cos*a2)/(det*one),(d*a2-cos*a1)/(det*two)
def scan(A,b):
    """z_k = A_k z_{k-1}+b_k, b[0] includes the initial; Hillis-Steele"""
    A=A.clone(); A[0]=0; z=b.clone(); n=len(A); d=1
    while d<n:
        z=torch.cat([z[:d], torch.addcmul(z[d:],A[d:],z[:-d])]); A=torch.cat([A[:d],A[d:]*A[:-d]]); d*=2
    return z
def loop(net,c,z0,noise,batch=1):
    z=z0.flatten(1); L=c['L']; zs=[]
    for l in range(L):
        o=net(z.reshape(z0.shape).repeat(batch,1,1,1),c['t'][l:l+1].repeat(batch)).reshape(batch,-1)[:1].float()
        z=float(c['keep'][l])*z+float(c['gain'][l])*o
        if noise is not None: z=z+float(c['dev'][l])*noise[l].reshape(1,-1)
        zs.append(z[0])
    return torch.stack(zs)
